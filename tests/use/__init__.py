"""What is done with a model on a grid."""
