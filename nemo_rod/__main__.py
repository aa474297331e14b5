"""`python -m nemo_rod`: the command line, where its script is not on the path."""

from nemo_rod.cli import main

if __name__ == "__main__":
    main()
