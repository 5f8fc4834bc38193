"""The shop: a plain class, whose public methods are tools."""


class Shop:
    """Look up the stock, and order the difference: no more, no less."""

    score_name = "stocked"

    def reset(self, item: str, want: int, stock: int, **row: object) -> None:
        self.item = item
        self.want = want
        self.stock = {item: stock}
        self.done = False

    def count(self, item: str) -> int:
        """Count what lies in the store.

        Args:
            item: What to count.
        """
        return self.stock.get(item, 0)

    def order(self, item: str, number: int) -> str:
        """Order more. This ends the work.

        Args:
            item: What to order.
            number: How many.
        """
        self.stock[item] = self.count(item) + number
        self.done = True
        return "ordered"

    @property
    def score(self) -> bool:
        return self.done and self.count(self.item) == self.want

    def get_reward(self) -> float:
        return float(self.score)
