"""What can be said about models and traffic without serving them."""
