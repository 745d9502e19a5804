"""Where ranks run: launched, placed, joined, watched, ended."""
