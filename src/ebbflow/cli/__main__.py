"""``python -m ebbflow.cli``: the command line where no script is installed."""

from ebbflow.cli import main

if __name__ == "__main__":
    main()
