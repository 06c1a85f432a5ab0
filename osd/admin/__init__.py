"""What operators do, from the command line or over HTTP: move versions, forget requests, and leave a record of both."""
