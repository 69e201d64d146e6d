"""Pictures, each a function that draws one and says where."""
