"""`python -m tracefp4` and the command `tracefp4`; Ctrl-C while the command line is imported is no traceback."""

import sys
from typing import NoReturn


def run() -> NoReturn:
    try:
        from tracefp4.cli import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
