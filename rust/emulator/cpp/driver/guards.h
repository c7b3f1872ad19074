// Bytes beside memory that are poison until somebody writes past it.
#pragma once

#include <optional>
#include <string>

namespace kvrelay_emulated {

// What was written between `guard` and `begin`, or `end` and `limit`, in words; each of the two is at most a
// page.
std::optional<std::string> written_beside(unsigned char* guard, unsigned char* begin, unsigned char* end,
                                          unsigned char* limit, const std::string& what);

}  // namespace kvrelay_emulated
