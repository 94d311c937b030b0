// A doubly linked list whose links live in the elements: insert, remove and splice in O(1), nothing allocated.
//
// The list owns nothing. An element stands in at most one list per Link base it has, and must be removed before it dies.
#pragma once

#include <cassert>
#include <cstddef>

namespace tokenspeed {

// Derive from ListLink<Tag> once for each list that an element can stand in.
template <class Tag>
struct ListLink {
  ListLink* prev = nullptr;
  ListLink* next = nullptr;
  [[nodiscard]] bool linked() const noexcept { return next != nullptr; }
};

template <class T, class Tag>
class IntrusiveList {
  using Link = ListLink<Tag>;

 public:
  IntrusiveList() noexcept { head_.prev = head_.next = &head_; }
  IntrusiveList(const IntrusiveList&) = delete;
  IntrusiveList& operator=(const IntrusiveList&) = delete;

  [[nodiscard]] bool empty() const noexcept { return head_.next == &head_; }
  // REQUIRES: !empty().
  [[nodiscard]] T& front() noexcept { return *static_cast<T*>(head_.next); }

  // REQUIRES: the element stands in no list of this tag.
  void PushBack(T& element) noexcept { Insert(element, *head_.prev, head_); }
  // REQUIRES: `place` stands in this list, and the element in none of this tag.
  void InsertBefore(T& element, T& place) noexcept {
    Link& next = place;
    Insert(element, *next.prev, next);
  }
  void PushFront(T& element) noexcept { Insert(element, head_, *head_.next); }

  // REQUIRES: the element stands in this list.
  void Remove(T& element) noexcept {
    Link& link = element;
    assert(link.linked());
    link.prev->next = link.next;
    link.next->prev = link.prev;
    link.prev = link.next = nullptr;
  }

  // From the front, until `visit` returns false. REQUIRES: it does not change the list.
  template <class F>
  void VisitWhile(F&& visit) {
    for (Link* link = head_.next; link != &head_; link = link->next) {
      if (!visit(*static_cast<T*>(link))) return;
    }
  }

  template <class F>
  void ForEach(F&& visit) const {
    for (const Link* link = head_.next; link != &head_; link = link->next) visit(*static_cast<const T*>(link));
  }

 private:
  static void Insert(Link& link, Link& prev, Link& next) noexcept {
    assert(!link.linked());
    link.prev = &prev;
    link.next = &next;
    prev.next = &link;
    next.prev = &link;
  }

  Link head_;
};

}  // namespace tokenspeed
