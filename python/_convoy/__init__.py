"""What must not load convoy itself: the entry points of torch and of the shell."""
