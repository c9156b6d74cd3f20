"""``python -m headstart``: the command, where the folder of scripts is not on the path."""

from headstart.cli import main

if __name__ == "__main__":
    main()
