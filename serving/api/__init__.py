"""The API of OpenAI's clients: routes, what requests ask, and the shape of answers."""
