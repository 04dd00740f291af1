"""The APM demonstration: an application like any other, made of kivi's public names."""
