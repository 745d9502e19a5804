"""Before ranks have a process group: the signals they hear, the store where they meet, and whether their jobs agree."""
