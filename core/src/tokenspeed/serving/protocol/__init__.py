"""Bodies of requests and answers: typed structs, limits, and the shapes that OpenAI clients expect."""
