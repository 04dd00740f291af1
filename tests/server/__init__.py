"""A package to pytest as well, so that what its tests share for as long as the package lasts ends with it: a server, a browser."""
