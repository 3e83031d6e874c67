"""Import this before other packages of ours: it raises ImportError if they would not be ours."""

from nanochat_flows.packages import check_packages

check_packages()
