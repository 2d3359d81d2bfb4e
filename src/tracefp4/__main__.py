"""`python -m tracefp4` is the command line."""

from tracefp4.cli import main

if __name__ == "__main__":
    main()
