"""The load client behind ``tokenspeed bench serve``: speaks to any OpenAI-compatible server over HTTP and imports no other part of the engine."""
