"""Ranks compare every field of a trainer's config and of the options of sharding, or it is named here with the reason.

link_fields.py IMPL TEST ...   (the tests vary each field alone, in a row "ROW(config.model.keep, ...)")
"""

import re
import sys
from pathlib import Path

HEADERS = [
    "train/train.h",
    "transformer/transformer.h",
    "optimizer/optimizer.h",
    "ops/ops.h",
    "base/base.h",
    "shard/shard.h",
]
ROOTS = {"config": "td_train_config", "options": "td_shard_options"}
NOT_COMPARED = {
    "config.model.batch": "only room: each step compares the batch's shape",
    "config.model.context": "only room: each step compares the batch's shape",
    "config.model.use": "follows from until",
    "config.model.owned": "this rank's part",
    "config.model.owned_count": "this rank's part",
    "config.model.grad_places": "this rank's part",
    "config.update_sms": "compared, but only a GPU has more than one choice",
    "config.own_groups": "set by td_shard_link_create, whose kind is compared",
    "config.hooks": "an address in this process",
}
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\n\} \1;", re.DOTALL)


def fields(structs: dict[str, str], struct: str, path: str) -> list[str]:
    found = []
    for member in structs[struct].split(";"):
        if not member.strip():
            continue
        first, *more = member.split(",")
        kind, one = re.fullmatch(r"\s*(.*?)(\w+)\s*", first, re.DOTALL).groups()
        for name in [one, *map(str.strip, more)]:
            inner = kind.strip()
            at = f"{path}.{name}"
            found += fields(structs, inner, at) if inner in structs else [at]
    return found


def main() -> int:
    impl, *tests = sys.argv[1:]
    text = COMMENT.sub(" ", "\n".join((Path(impl) / header).read_text() for header in HEADERS))
    structs = dict(STRUCT.findall(text))
    known = {at for path, struct in ROOTS.items() for at in fields(structs, struct, path)}
    varied = set(
        re.findall(r"\bROW\(((?:config|options)\.[\w.]+),", "".join(Path(t).read_text() for t in tests))
    )
    for at in sorted(known - varied - set(NOT_COMPARED)):
        print(f"{at} has no row: compare it (impl/train/settings.c, impl/shard/link.c), or say here why not")
    for at in sorted((varied | set(NOT_COMPARED)) - known):
        print(f"{at} is in no header")
    print(f"link_fields: {len(known)} fields, {len(varied)} varied, {len(NOT_COMPARED)} with a reason")
    return 0 if known == varied | set(NOT_COMPARED) and len(known) > 40 else 1


if __name__ == "__main__":
    sys.exit(main())
