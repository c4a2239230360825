"""Studies of one question each, dated: the first line of each says what it found."""
