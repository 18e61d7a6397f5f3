#!/usr/bin/env bash
# example_train_text.sh GLOO PROGRAM: a run that stops and goes on writes the file of one that does not.
# Two ranks go on where one rank stopped. Another text is refused.
set -euo pipefail

gloo=$1 train=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
seq 3 3 9000 >text
"$train" text whole 40 >said
"$train" text cut 20 >/dev/null
cp cut ranks
"$train" text cut 40
cmp whole cut
grep -qx 'step 40: held out [12]\.[0-9]*' said
head -c 9000 text >other
if "$train" other cut 50 2>refused; then exit 1; fi
grep -q "is of a text of $(wc -c <text) bytes, not of 9000" refused
if [ "$gloo" = 1 ]; then
    WORLD_SIZE=2 RANK=1 MASTER_PORT=$$ "$train" text ranks 40 &
    WORLD_SIZE=2 RANK=0 MASTER_PORT=$$ "$train" text ranks 40 | tee said.2
    wait $!
    [ "$(sed -n '/^step 40/s/.$//p' said.2)" = "$(sed -n '/^step 40/s/.$//p' said)" ]
fi
echo "one rank and two ranks went on"
