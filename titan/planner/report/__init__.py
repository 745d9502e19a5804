"""Predictions shown: words, pictures, studies, closed forms."""
