"""The measured search for a layout: what has been tried, what to try next, and a trial on the machine at hand."""
