"""What the agent lives in, and what it is paid for: here the tool environment, with a score of its own."""

from agent_r1.core import StopReason
from agent_r1.env import HermesToolEnv, Outcome
from agent_r1.env.hermes import answer_of


class Sums(HermesToolEnv):
    def outcome(self, stop_reason: StopReason) -> Outcome:
        """1 for the right number, however it is written ("7", "7.0", " 7 ")."""
        answer = answer_of(self.final_turn or "") if stop_reason is StopReason.ANSWERED else None
        try:
            right = float(answer or "nan") in map(float, self.row["reward_model"]["ground_truth"])
        except ValueError:
            right = False
        return Outcome(reward=float(right), parts={"right": float(right)})
