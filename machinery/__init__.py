"""What each stage needs and no reader of the method must know: a room a file, named after what is in it."""
