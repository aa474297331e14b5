"""Sources that only the toy recipes read: Debian's manual pages, and text made of nothing."""
