"""Why a step takes as long as it does: a plan and the measured slots of a step in, causes and changes out. Pure."""
