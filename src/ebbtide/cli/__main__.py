"""``python -m ebbtide.cli``: the command line where no script is installed."""

from ebbtide.cli import main

if __name__ == "__main__":
    main()
