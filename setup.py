"""Lists the packages, so that a new folder needs no entry anywhere; everything else stands in pyproject.toml.

The folders beside `titan/` are installed below its name: nothing generic lands in site-packages.
"""

from setuptools import find_packages, setup

BESIDE = ("plugins", "planner", "inference", "testing", "configs")
FOLDERS = {"titan": "titan", **{f"titan.{folder}": folder for folder in BESIDE}}

setup(
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{inner}" for inner in find_packages(folder)))
    ]
)
