"""Define the environment and its reward: the tool environment, with a score of its own."""

from agent_r1 import HermesToolEnv, Outcome, StopReason


class Sums(HermesToolEnv):
    def outcome(self, stop_reason: StopReason) -> Outcome:
        """Return 1 for the right number in any notation ("7", "7.0", " 7 ")."""
        answer = None
        if stop_reason is StopReason.ANSWERED:
            answer, _ = self.dialect.answer_in(self.final_turn or "")
        try:
            right = float(answer or "nan") in map(float, self.row["reward_model"]["ground_truth"])
        except ValueError:
            right = False
        return Outcome(reward=float(right), parts={"right": float(right)})
