"""What online distillation earns: experiments on text that the target wrote once."""
