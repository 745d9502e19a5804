"""A layout as a picture: what each rank holds, and which ranks exchange what."""
