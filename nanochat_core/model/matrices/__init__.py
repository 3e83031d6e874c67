"""Linear maps whose backward pass adds the matrix's gradient to the optimizer's sum."""
