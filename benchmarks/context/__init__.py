"""Long contexts of which a layer reads only what it selects: what that saves, and what it loses."""
