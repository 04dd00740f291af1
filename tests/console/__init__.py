"""To pytest, a package: what its tests share, such as a server or a browser, ends with the last of them."""
