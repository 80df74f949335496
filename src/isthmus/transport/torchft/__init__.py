"""The elastic engine over torchft's lighthouse."""
