import sys
import traceback

if __name__ == "__main__":
    try:
        from parity.core.command import main
    except ImportError:  # Python would end with 1, which says that a case failed or that something got worse
        traceback.print_exc()
        sys.exit(2)
    sys.exit(main("parity"))
