"""The server process: HTTP in front, the engine behind a pair of sockets. Never imports the engine or torch."""
