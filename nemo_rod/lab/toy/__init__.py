"""Sources that only the toy recipes read: Debian packages and synthetic text."""
