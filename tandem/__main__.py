"""The command `tandem` of the package: `tandem doctor` is the page for a bug report, all else is the C program."""

import os
import sys

from . import builds


def main() -> int:
    if sys.argv[1:2] == ["doctor"]:
        from .doctor import report

        print(report())
        return 0
    try:
        path = builds.program()
        os.execv(path, [str(path), *sys.argv[1:]])
    except (OSError, RuntimeError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
