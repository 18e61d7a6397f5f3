import sys

from parity.core.command import main

if __name__ == "__main__":
    sys.exit(main("parity"))
