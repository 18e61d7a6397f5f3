"""test_fuzz_api covers every function that the public headers declare.

fuzz_api_covers.py PROGRAM FOLDER_OF_CHECKS HEADER ...
"""

import subprocess
import sys


def main() -> int:
    program, checks, *headers = sys.argv[1:]
    sys.path.insert(0, checks)
    from symbols import IMPL, declared

    names = set().union(*(declared((IMPL / header).read_text()) for header in headers))
    covered = set(
        subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
    )
    for name in sorted(names - covered):
        print(
            f'{name} is declared, but not called by test_fuzz_api: add an "API({name})" to tests/fuzz_api_*.c'
        )
    for name in sorted(covered - names):
        print(f"{name} is called by test_fuzz_api, but declared in no public header")
    print(f"fuzz_api: {len(names)} functions declared, {len(covered)} covered")
    return 0 if names == covered and len(names) > 50 else 1


if __name__ == "__main__":
    sys.exit(main())
