"""Which folder becomes which package; everything else about the distribution is in pyproject.toml.

This is code and not a table in pyproject.toml because setuptools can either find packages or rename them
there, not both, and a list of every subpackage by hand would go stale in silence.
"""

from setuptools import find_packages, setup

# A folder of this repository -> the package it is installed as. These two are all that an installation adds to
# site-packages; tests/test_packaging.py asserts it. The demonstration (apm_demo) runs from the checkout only.
FOLDERS = {"kivi": "kivi", "server": "kivi_server"}

setup(
    package_dir={package: folder for folder, package in FOLDERS.items()},
    packages=[
        name
        for folder, package in FOLDERS.items()
        for name in (package, *(f"{package}.{sub}" for sub in find_packages(folder)))
    ],
)
