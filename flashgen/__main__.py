"""`python -m flashgen` is the `flashgen` command."""

from flashgen.cli import main

if __name__ == "__main__":
    main()
