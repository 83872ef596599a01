"""What is rounded where: the plan, the static multipliers, the calibration and the expert-weight quantizer."""
