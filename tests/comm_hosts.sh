#!/usr/bin/env bash
# Two network namespaces simulate two hosts. Their ranks share no memory, and only one network connection.
# They meet by a directory, by an address, or by MPI. In some runs one rank dies, sleeps or makes another
# call.
#   comm_hosts.sh TEST_COMM TEST_COMM_DRIVER [MPIRUN]
# Needs root and iproute2. Without them the test is skipped (77).
set -euo pipefail

comm=$1 driver=$2 mpirun=${3:-}
name=td$$
work=$(mktemp -d)
hosts=("$name-a" "$name-b")
ips=(10.83.7.1 10.83.7.2)
six=(fd83::1 fd83::2)

skip() {
    echo "skipped: $*"
    exit 77
}
die() {
    echo "error: $*" >&2
    exit 1
}

clean() {
    local host process
    for host in "${hosts[@]}"; do
        for process in $(ip netns pids "$host" 2>/dev/null); do
            kill -KILL "$process" 2>/dev/null || true
        done
        ip netns del "$host" 2>/dev/null || true
    done
    rm -rf "$work"
}

[ "$(id -u)" -eq 0 ] || skip "network namespaces need root"
command -v ip >/dev/null || skip "no iproute2"
trap clean EXIT
ip netns add "${hosts[0]}" 2>/dev/null || skip "this system makes no network namespaces"
# In a chroot, for one, / is no mount point.
said=$(ip netns exec "${hosts[0]}" unshare --uts --mount true 2>&1) ||
    skip "no command runs in a network namespace of this system: $said"
ip netns add "${hosts[1]}"
ip link add "$name-0" type veth peer name "$name-1" 2>/dev/null || skip "this system has no veth"
for i in 0 1; do
    ip link set "$name-$i" netns "${hosts[i]}"
    ip -n "${hosts[i]}" link set "$name-$i" name "$name"
    ip -n "${hosts[i]}" addr add "${ips[i]}/24" dev "$name"
    ip -n "${hosts[i]}" addr add "${six[i]}/64" dev "$name" nodad || skip "this system has no IPv6"
    ip -n "${hosts[i]}" link set "$name" up
    ip -n "${hosts[i]}" link set lo up
done

# As on Debian: localhost has an IPv4 and an IPv6 address, and a host finds 127.0.1.1 for its own name.
for i in 0 1; do
    cat >"$work/hosts.$i" <<HOSTS
::1 localhost
127.0.0.1 localhost
127.0.1.1 host$i.cluster host$i
${ips[1 - i]} host$((1 - i)).cluster host$((1 - i))
${six[0]} both
${ips[0]} both
${six[0]} only6
HOSTS
done

# on HOST COMMAND...: runs the command on a host, with this host's name.
on() {
    local host=$1
    shift
    # shellcheck disable=SC2016 # the inner shell expands these
    ip netns exec "${hosts[host]}" unshare --uts --mount sh -c \
        'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"' "host$host" "$work/hosts.$host" "$@"
}

# ranks COUNT COMMAND...: runs ranks on the hosts of `where` in turn. Their output is in work/said.RANK.
where=(0 1)
ranks() {
    local count=$1 rank started=() failed=0 job
    shift
    for ((rank = 0; rank < count; rank++)); do
        (
            export RANK=$rank WORLD_SIZE=$count TANDEM_RUN=$name TD_RUN=$name TD_SAID=$work
            on "${where[rank % ${#where[@]}]}" "$@"
        ) >"$work/said.$rank" 2>&1 &
        started+=($!)
    done
    for job in "${started[@]}"; do
        wait "$job" || failed=1
    done
    return "$failed"
}

mkdir "$work/directory"
TANDEM_DIRECTORY=$work/directory ranks 3 "$comm" gloo || die "by a directory: $(cat "$work"/said.*)"
[ -z "$(ls "$work/directory")" ] || die "the directory holds $(ls "$work/directory")"
echo "three ranks on two hosts, by a directory: passed"
TANDEM_ADDRESS=${ips[0]}:29917 ranks 2 "$comm" gloo || die "by an address: $(cat "$work"/said.*)"
echo "two ranks on two hosts, by an address: passed"

# fault NAME WORDS: runs three ranks. Rank 1 is alone on its host and makes the fault.
fault() {
    local rank
    rm -f "$work"/rank.*
    TD_DIRECTORY=$work/directory TD_SECONDS=2 TD_OPEN_SECONDS=20 ranks 3 timeout 7 "$driver" gloo "$1" 1 || true
    for rank in 0 2; do
        if [ "$(grep -cE "$2" "$work/rank.$rank")" != 1 ]; then
            die "$1: rank $rank said '$(cat "$work/rank.$rank")', without '$2'"
        fi
    done
    echo "two hosts, $1: passed"
}
peer='rank 1 \(process [0-9]+ on host1\)'
fault killed "$peer died, its last call was all_reduce #[0-9]+ of 4194304 f32|$peer died"
fault count "$peer made another call, all_reduce #7 of 1001 f32 .*, where rank 0 made all_reduce #7 of 1000 f32"
fault sleeps "all_reduce #7 of 1000 f32 .*: $peer is late, its last call was all_reduce #6"
fault leaves "$peer made another call, close #7"

# meets NAME HOSTS VARIABLE=VALUE: two ranks on one host, or three on two hosts, find each other and reduce.
meets() {
    local said
    read -ra where <<<"$2"
    rm -f "$work"/rank.* "$work"/ready.*
    export "${3?}"
    TD_SECONDS=20 TD_OPEN_SECONDS=20 ranks $((2 + where[-1])) timeout 30 "$driver" gloo none -1 ||
        die "$1: $(cat "$work"/said.* "$work"/rank.*)"
    unset "${3%%=*}"
    said=$(cat "$work"/rank.*)
    [ -z "$said" ] || die "$1: $said"
    echo "$1: passed"
}
meets "one host, localhost" "0 0" TD_ADDRESS=localhost:29918
meets "one host, ::1" "0 0" "TD_ADDRESS=[::1]:29919"
meets "one host, its own name" "0 0" TD_ADDRESS=host0:29920
meets "one host, a name with both" "0 0" TD_ADDRESS=both:29921
meets "two hosts, IPv6" "0 1" "TD_ADDRESS=[${six[0]}]:29922"
meets "two hosts, a name with both" "0 1" TD_ADDRESS=both:29923
meets "two hosts, a name with IPv6" "0 1" TD_ADDRESS=only6:29924
meets "two hosts, a name that is 127.0.1.1 on its own" "0 1" TD_ADDRESS=host0.cluster:29925
# A link-local address: ranks of one host meet. Gloo does not connect two hosts, and the errors name the
# address.
link=$(ip -n "${hosts[0]}" -6 -o addr show dev "$name" scope link | awk '{print $4}')
meets "one host, a link-local address" "0 0" "TD_ADDRESS=[${link%/*}%$name]:29928"
where=(0 1)
rm -f "$work"/rank.*
if TD_SECONDS=6 TD_OPEN_SECONDS=6 TD_ADDRESS="[${link%/*}%$name]:29929" ranks 2 timeout 30 "$driver" gloo none -1; then
    die "two hosts, a link-local address: no error"
fi
[ "$(grep -c 'other hosts cannot use the link-local address fe80:' "$work"/rank.0)" = 1 ] ||
    die "two hosts, a link-local address: $(cat "$work"/rank.*)"
echo "two hosts, a link-local address: refused"
for i in 0 1; do
    ip -n "${hosts[i]}" addr del "${ips[i]}/24" dev "$name"
    ip -n "${hosts[i]}" addr del 127.0.0.1/8 dev lo
done
meets "one host without IPv4, localhost" "0 0" TD_ADDRESS=localhost:29927
meets "one host without IPv4, by a name" "0 0" TD_NOTHING=
meets "two hosts without IPv4, by a directory" "0 0 1" "TD_DIRECTORY=$work/directory"
for i in 0 1; do
    ip -n "${hosts[i]}" addr add 127.0.0.1/8 dev lo
    ip -n "${hosts[i]}" addr add "${ips[i]}/24" dev "$name"
done
where=(0 1)

[ -n "$mpirun" ] || exit 0
# mpirun uses this script instead of ssh to reach a host.
cat >"$work/agent" <<AGENT
#!/bin/sh
shift
exec ip netns exec ${hosts[1]} unshare --uts sh -c "hostname host1; \$*"
AGENT
chmod +x "$work/agent"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpi=("$mpirun" -n 2 -H "${ips[0]}:1,${ips[1]}:1" --bind-to none --mca plm_rsh_agent "$work/agent" --mca btl "self,tcp"
    --mca btl_tcp_if_include "${ips[0]}/24" --mca oob_tcp_if_include "${ips[0]}/24")
on 0 timeout 100 "${mpi[@]}" "$comm" mpi >"$work/said" 2>&1 || die "by MPI: $(cat "$work/said")"
grep -q '\[  PASSED  \]' "$work/said" || die "by MPI: $(cat "$work/said")"
echo "two ranks on two hosts, by MPI: passed"
on 0 timeout 100 "${mpi[@]}" "$comm" gloo >"$work/said" 2>&1 || die "Gloo by MPI: $(cat "$work/said")"
echo "two ranks on two hosts, Gloo's by MPI: passed"
