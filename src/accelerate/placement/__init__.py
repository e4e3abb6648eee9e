# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a big model live, and how they get there."""
