"""One launch from requests to results; the engine calls it."""
