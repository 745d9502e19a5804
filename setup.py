"""Lists the packages, so that a new folder needs no entry anywhere; everything else stands in pyproject.toml.

`plugins/` and `configs/` are installed below the name titan: nothing generic lands in site-packages.
"""

from setuptools import find_packages, setup

FOLDERS = {"titan": "titan", "titan.plugins": "plugins", "titan.configs": "configs"}

setup(
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{inner}" for inner in find_packages(folder)))
    ]
)
