"""Early exits as drafter: heads inside the target, and a controller that says where to leave it, or to stop."""
