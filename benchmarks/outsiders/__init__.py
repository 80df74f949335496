"""What those who reach every port of a run, and hold no key of it, can do to it."""
