"""`python -m tpl` is `tpl`."""

from tpl.cli import main

if __name__ == "__main__":
    main()
