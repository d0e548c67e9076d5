"""`python -m rooftile`: the command line where its script is not on the path."""

from rooftile.cli.start import main

if __name__ == "__main__":
    main()
