"""`python -m headstart.cli` is `headstart`."""

from headstart.cli import main

if __name__ == "__main__":
    main()
